-- Index for the listing of completed entries by their expiry. It omits leases and orphans, which the index on the expiry of
-- all rows has as well. May be run repeatedly, and by several processes at the same time.

create index if not exists "tower_idempotency_completed" on "tower_idempotency" (expires, id) where completed is not null;
