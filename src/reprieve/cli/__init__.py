"""The command line: thin classes of flags, each imported only when it is called."""
