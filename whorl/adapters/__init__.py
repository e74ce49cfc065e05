"""whorl's operators inside other frameworks. Nothing changes on import; each module has an explicit `install`."""
