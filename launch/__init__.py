"""Everything about processes: command line, configuration, coordinator, supervision and reports."""
