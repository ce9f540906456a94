"""Choice of the next unit and of its devices: plan, schedule, leases, inventory, and data recorded by earlier runs."""
