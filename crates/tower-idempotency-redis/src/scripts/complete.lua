-- Stores the record and ends the lease. KEYS: entry, and indexes of leases and of records that need attention unless there
-- are none, and of completed entries if there is one. ARGV: token, fingerprint, generation, record, retention in ms, 1 to
-- publish, id.
-- Returns 1, or 0 if another token holds or completed the entry, or -1 if a newer version wrote it or it is damaged.
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'f')
local state, token = entry[1], entry[2]
if not state and (token or entry[3]) or state and state ~= 'L' and state ~= 'D' then
  return -1
end
if state and token and token ~= ARGV[1] or state == 'D' and not token then
  return 0
end
if state == 'D' then
  -- This token completed the entry before. Sets its expiry again, unchanged: a caller that waits for replicas after this
  -- call then waits for a write. This write needs no memory, since the server may have none left.
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then
    redis.call('PEXPIRE', KEYS[1], left)
  else
    -- An operator removed the expiry.
    redis.call('HSET', KEYS[1], 't', token)
  end
  return 1
end
-- Removes the lease first. HDEL needs no memory, and a script that has written continues when memory is full, so that a
-- lease holder can always store its record. DEL will not do: in a slot that is being moved, a deleted key belongs to the
-- other node, which would refuse the rest of the script.
redis.call('HDEL', KEYS[1], 'l', 'k')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if state and token then
  -- The token holds the lease, so the entry has the token and the generation already.
  redis.call('HSET', KEYS[1], 's', 'D', 'f', ARGV[2], 'b', ARGV[4], 'c', now)
else
  redis.call('HSET', KEYS[1], 's', 'D', 't', ARGV[1], 'f', ARGV[2], 'g', ARGV[3], 'b', ARGV[4], 'c', now)
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
if KEYS[2] then
  redis.pcall('ZREM', KEYS[2], ARGV[7])
  if string.sub(ARGV[4], 1, 2) == '\1\2' then
    redis.pcall('ZADD', KEYS[3], now, ARGV[7])
  end
  if KEYS[4] and is_completed(ARGV[4]) then
    add_completed(KEYS[4], now, ARGV[5], ARGV[7])
  end
end
if ARGV[6] == '1' then
  -- Only a hint: the rest also succeeds for a user without rights on the channel.
  redis.pcall('PUBLISH', KEYS[1], '')
end
return 1
