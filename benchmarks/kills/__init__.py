"""A run whose processes are killed: roles, the services around the run, the restarted command, and what a kill costs."""
