-- begin
begin immediate;

-- mark
savepoint tower_idempotency;

-- lease status
select coalesce(token = ?2 and completed is null and expires > cast(unixepoch('subsec') * 1000 as integer), false)
from main."tower_idempotency" where id = ?1;

-- release mark
release savepoint tower_idempotency;

-- write record
update main."tower_idempotency" set expires = cast(unixepoch('subsec') * 1000 as integer) + ?3, completed = cast(unixepoch('subsec') * 1000 as integer), record = ?4,
  checkpoint = case when substr(?4, 2, 1) = x'02' then checkpoint end,
  checkpoint_data = case when substr(?4, 2, 1) = x'02' then checkpoint_data end
where id = ?1 and token = ?2 and completed is null and expires > cast(unixepoch('subsec') * 1000 as integer) returning 1;
