"""One module per command: EXAMPLES, `add_arguments(parser)` and `main(args) -> exit status`."""
