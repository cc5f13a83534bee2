"""One module a command: EXAMPLES, `add_arguments(parser)` and `main(args) -> exit status`."""
