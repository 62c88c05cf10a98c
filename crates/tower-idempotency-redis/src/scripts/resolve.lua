-- Applies a decision of an operator to an entry that has not changed since it was read.
-- KEYS: entry, and indexes of leases and of records that need attention unless there are none, and of completed entries if
-- there is one.
-- ARGV: the fields s, t, g, l, c as they were read, each with a leading '=' or empty if it was absent; the state: 'live',
-- 'orphan', 'record', or 'type' for a key of another type; the decision: 'orphan', 'complete' or 'delete'; the new token, the
-- orphan retention of an entry that has none or the retention in ms, the record, 1 to publish, id.
-- Returns 1, or 0 if the entry has changed. The store sends each call once.
local state, decision, token, id = ARGV[6], ARGV[7], ARGV[8], ARGV[12]
local kind = redis.call('TYPE', KEYS[1]).ok
if state == 'type' then
  if kind == 'none' or kind == 'hash' then
    return 0
  end
  redis.call('DEL', KEYS[1])
  return 1
end
if kind ~= 'hash' then
  return 0
end
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'g', 'l', 'c', 'k')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for field = 1, 5 do
  local expected = ARGV[field]
  local found = entry[field] and '=' .. entry[field] or ''
  -- Renewals may change the expiry of a live lease.
  if found ~= expected and not (field == 4 and state == 'live') then
    return 0
  end
end
if state == 'live' and now >= tonumber(entry[4]) or state == 'orphan' and now < tonumber(entry[4]) then
  return 0
end
local at = string.format('%.0f', now)
-- HDEL comes first: it needs no memory, and a script that has written continues when memory is full.
if decision == 'delete' then
  redis.call('DEL', KEYS[1])
  if KEYS[2] then
    redis.pcall('ZREM', KEYS[2], id)
    redis.pcall('ZREM', KEYS[3], id)
    if KEYS[4] then
      redis.pcall('ZREM', KEYS[4], id)
    end
  end
elseif decision == 'orphan' then
  local retention = entry[6] or ARGV[9]
  redis.call('HDEL', KEYS[1], 'b', 't')
  redis.call('HSET', KEYS[1], 's', 'L', 't', token, 'l', at, 'k', retention)
  redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', now + retention))
  if KEYS[2] then
    redis.pcall('ZADD', KEYS[2], score(now, retention), id)
    redis.pcall('ZREM', KEYS[3], id)
  end
else
  redis.call('HDEL', KEYS[1], 'l', 'k', 't')
  redis.call('HSET', KEYS[1], 's', 'D', 't', token, 'b', ARGV[10], 'c', at)
  redis.call('PEXPIRE', KEYS[1], ARGV[9])
  if KEYS[2] then
    redis.pcall('ZREM', KEYS[2], id)
    if string.sub(ARGV[10], 1, 2) == '\1\2' then
      redis.pcall('ZADD', KEYS[3], at, id)
    else
      redis.pcall('ZREM', KEYS[3], id)
    end
    if KEYS[4] and is_completed(ARGV[10]) then
      add_completed(KEYS[4], now, ARGV[9], id)
    end
  end
end
if ARGV[11] == '1' then
  -- Only a hint: the rest also succeeds for a user without rights on the channel.
  redis.pcall('PUBLISH', KEYS[1], '')
end
return 1
