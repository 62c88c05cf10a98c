-- The index of completed entries, which an option adds. A score is the time at which the record expires. A completion adds one
-- member and removes at most four that have expired, so its work is bounded.
local MOST_REMOVED = 4
-- Returns true unless the record needs attention. A record with a damaged code is unreadable, and is in both indexes.
local function is_completed(record)
  local length = string.byte(record, 7) or 0
  local code = string.sub(record, 8, 7 + length)
  local is_readable = #code == length and length <= 64 and string.find(code, '^[a-z0-9%-]+$')
  return string.sub(record, 1, 2) ~= '\1\2' or not is_readable
end
-- Adds a record with this retention. Returns the number of members added, or an error.
local function add_completed(index, now, retention, id)
  local expired = redis.pcall('ZRANGEBYSCORE', index, '-inf', string.format('(%.0f', now), 'LIMIT', 0, MOST_REMOVED)
  if expired.err then
    -- The user may not read the index. Without removals the index would grow without limit, so it gets no member.
    return expired
  end
  -- The new member, which may be one of them, is added afterwards.
  if expired[1] then
    redis.pcall('ZREM', index, unpack(expired))
  end
  local added = redis.pcall('ZADD', index, string.format('%.0f', now + retention), id)
  -- The index expires after its last record. It is set to twice the retention, so that few completions have to set it.
  local left = redis.pcall('PTTL', index)
  if type(left) == 'number' and left < tonumber(retention) then
    redis.pcall('PEXPIRE', index, string.format('%.0f', 2 * retention))
  end
  return added
end
