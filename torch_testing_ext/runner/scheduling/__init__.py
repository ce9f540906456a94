"""Which unit runs next, and on what: plan, policy, leases, inventory, and what earlier runs taught."""
