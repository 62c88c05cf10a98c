-- Index for the listings of operators: records that need attention. Their second byte is 2. It is small, because it omits
-- all other rows. May be run repeatedly, and by several processes at the same time.

create index if not exists "tower_idempotency_attention" on "tower_idempotency" (completed, id)
    where substr(record, 2, 1) = x'02';
