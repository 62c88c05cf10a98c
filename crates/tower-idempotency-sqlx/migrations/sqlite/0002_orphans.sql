-- Index on the expiry of leases. Completers use it to find orphans. It is small, because it omits completed rows.
-- May be run repeatedly, and by several processes at the same time.

create index if not exists "tower_idempotency_orphans" on "tower_idempotency" (lease_ends, id) where completed is null;
