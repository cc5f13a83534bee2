"""List the devices that can run bundles: this CPU, and the GPUs that the IREE runtime finds.

A bundle runs on the kind of device that it was compiled for. If there are several GPUs, the option
--device of other commands selects one.
"""

import argparse
import json
from dataclasses import asdict

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.terminal import megabytes

EXAMPLES = """\
examples:
  castiron devices
  castiron compile smollm2-135m-instruct --target vulkan -o build/gpu
  castiron run build/gpu "Why is the sky blue?" --device vulkan:1

--json prints one object: devices, each with id (the value of --device), driver, name, memory (bytes;
null if the driver does not report it), version (of the driver), features, and target (the value of
castiron compile --target); and unavailable, with the reason for each driver that cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.engine.memory import total_bytes
    from castiron.vmfb.cpu_features import host_cpu, host_features
    from castiron.vmfb.device.gpus import DRIVERS, DeviceError, DeviceInfo, devices_of
    from castiron.vmfb.targets import TARGET_OF_DRIVER

    found = [(DeviceInfo("cpu", "local", host_cpu(), total_bytes(), "", tuple(sorted(host_features()))), "host")]
    unavailable = {}
    for driver in DRIVERS:
        try:
            found.extend((info, TARGET_OF_DRIVER[driver]) for info in devices_of(driver))
        except DeviceError as error:
            unavailable[driver] = str(error)
    if args.json:
        devices = [asdict(info) | {"target": target} for info, target in found]
        print(json.dumps({"devices": devices, "unavailable": unavailable}))
        return 0
    for info, target in found:
        memory = "memory unknown" if info.memory is None else megabytes(info.memory)
        version = f", driver {info.version}" if info.version else ""
        print(f"{info.id:<10} {info.name}, {memory}{version}; --target {target}")
        print(f"{'':<10} {' '.join(info.features)}")
    for driver, reason in unavailable.items():
        print(f"{driver:<10} {reason}")
    return 0
