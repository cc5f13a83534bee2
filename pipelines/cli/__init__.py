"""The commands of castiron, one module each.

A module has EXAMPLES (the end of the command's --help), `add_arguments(parser)`, and `main(args)`,
which runs the command and returns the exit status.
"""
