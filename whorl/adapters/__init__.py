"""Our operators inside other frameworks: nothing changes on import, each module has an explicit `install`."""
