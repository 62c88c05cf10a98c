-- Ends the lease or the orphan that the token holds. KEYS: entry, and index of leases unless there is none. ARGV: token, 1 to
-- publish, id. Returns 1, or 0 if the token does not hold the entry.
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'g', 'k')
if entry[1] ~= 'L' or entry[2] ~= ARGV[1] then
  return 0
end
if entry[3] == '1' then
  redis.call('DEL', KEYS[1])
  if KEYS[2] then
    redis.pcall('ZREM', KEYS[2], ARGV[3])
  end
else
  -- The execution that was taken over may have had its effect. The entry is an orphan again, from now on, without a holder.
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('HDEL', KEYS[1], 't')
  redis.call('HSET', KEYS[1], 'l', string.format('%.0f', now))
  redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', now + entry[4]))
  if KEYS[2] then
    redis.pcall('ZADD', KEYS[2], score(now, entry[4]), ARGV[3])
  end
end
if ARGV[2] == '1' then
  -- Only a hint: the rest also succeeds for a user without rights on the channel.
  redis.pcall('PUBLISH', KEYS[1], '')
end
return 1
