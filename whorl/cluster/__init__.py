"""Several replicas of an engine behind one HTTP endpoint: `whorl serve --replicas N --on ray`."""
