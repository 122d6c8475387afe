"""The ``inferplane`` command. Sub-commands are imported only when they run, so that help is instant."""
