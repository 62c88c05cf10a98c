-- Puts an entry in the index of its state, and removes it from the others. KEYS: entry, index of leases, index of records that
-- need attention, and index of completed entries if there is one. ARGV: id. An entry that a newer version wrote stays where it is.
-- Returns {added, removed, skipped}: the members that an index did not have, those that it should not have had, and 1 if the
-- script got no indexes, because the slot is being moved.
if not KEYS[2] then
  return {0, 0, 1}
end
local id = ARGV[1]
local function remove(...)
  local removed = 0
  for _, index in ipairs({...}) do
    removed = removed + redis.call('ZREM', index, id)
  end
  return removed
end
local kind = redis.call('TYPE', KEYS[1]).ok
local entry = kind == 'hash' and redis.call('HMGET', KEYS[1], 's', 'l', 'c', 'b', 'k') or {}
if entry[1] == 'L' then
  -- A damaged time counts as 0.
  local added = redis.call('ZADD', KEYS[2], score(tonumber(entry[2] or 0) or 0, entry[5]), id)
  return {added, remove(KEYS[3], KEYS[4]), 0}
end
if kind ~= 'none' and entry[1] ~= 'D' then
  return {0, 0, 0}
end
local added, removed = 0, remove(KEYS[2])
if entry[1] == 'D' and string.sub(entry[4] or '', 1, 2) == '\1\2' then
  added = redis.call('ZADD', KEYS[3], tonumber(entry[3] or 0) and entry[3] or 0, id)
else
  removed = removed + remove(KEYS[3])
end
if KEYS[4] and entry[1] == 'D' and is_completed(entry[4] or '') then
  local time, left = redis.call('TIME'), redis.call('PTTL', KEYS[1])
  -- An operator removed the expiry: the entry counts as one with the longest retention, 100 years.
  local retention = left < 0 and 3153600000000 or left
  local found = add_completed(KEYS[4], time[1] * 1000 + math.floor(time[2] / 1000), retention, id)
  if type(found) ~= 'number' then
    return found
  end
  added = added + found
else
  removed = removed + remove(KEYS[4])
end
return {added, removed, 0}
