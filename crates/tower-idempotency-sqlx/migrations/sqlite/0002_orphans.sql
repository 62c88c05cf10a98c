-- Finds what is leased by when its lease ends, for those who look for orphans. It is small: a completed row is not in it.
-- May be run again and again, and by several at once.

create index if not exists "tower_idempotency_orphans" on "tower_idempotency" (lease_ends, id) where completed is null;
