delete from "tower_idempotency" where id = ?1 and token = ?2 and completed is null and expires > cast(unixepoch('subsec') * 1000 as integer) and generation = 1 and checkpoint is null returning 1
