"""Which unit runs next, and on which devices: plan, schedule, leases, inventory, and data recorded by earlier runs."""
