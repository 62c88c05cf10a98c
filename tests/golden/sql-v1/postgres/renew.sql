set transaction isolation level read committed; set local lock_timeout = 500;
update "tower_idempotency" e set lease_ends = now + {lease}, expires = now + {lease} + orphan_retention
from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = decode('{id}', 'hex') and e.token = decode('{token}', 'hex') and e.completed is null and e.expires > now returning true;
