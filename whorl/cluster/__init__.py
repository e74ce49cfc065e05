"""Several engines behind one address: `whorl serve --replicas N --on ray`."""
