set transaction isolation level read committed; set local lock_timeout = 500;
update "tower_idempotency" e set awaited = true from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock
where e.id = decode('{id}', 'hex') and e.completed is null and e.lease_ends > now and not e.awaited;
select e.completed is null and e.lease_ends > now
from "tower_idempotency" e, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = decode('{id}', 'hex');
