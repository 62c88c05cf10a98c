-- Acquires a lease, or returns the state that prevents it.
-- KEYS: entry, and index of leases unless there is none.
-- ARGV: token, fingerprint, lease in ms, orphan retention in ms, owner, operation, id, and which orphans may be taken over:
-- 1 all, 2 those whose retry an operator allows, 0 none. With a ninth argument, only a lease that the token holds is granted.
-- Returns {1, generation}, {2, fingerprint, ms left}, {3, fingerprint, ms since}, {4, fingerprint, record, ms left
-- (-1 if it never expires), token or nil}, {5} if only the ninth argument prevents the grant, or {0} for an entry that a newer
-- version wrote, or that is damaged.
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'f', 'g', 'l', 'b')
local state, token, fingerprint, generation = entry[1], entry[2], entry[3], entry[4]
if not state and (token or fingerprint or generation or entry[5] or entry[6]) then
  return {0}
end
if state == 'D' then
  return {4, fingerprint, entry[6], redis.call('PTTL', KEYS[1]), token}
end
if state and state ~= 'L' then
  return {0}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The server writes whole numbers of up to 17 digits without an exponent.
local ends = now + ARGV[3]
if not state then
  if ARGV[9] then
    return {5}
  end
  generation = 1
  redis.call('HSET', KEYS[1], 's', 'L', 'f', ARGV[2], 'g', 1, 'o', ARGV[5], 'p', ARGV[6], 'c', now,
    't', ARGV[1], 'l', ends, 'k', ARGV[4])
elseif token ~= ARGV[1] then
  local ended = tonumber(entry[5])
  if not ended or not tonumber(generation) then
    return {0}
  end
  if now < ended then
    return {2, fingerprint, ended - now}
  end
  local allowed = ARGV[8] == '1' or ARGV[8] == '2' and string.sub(token or '', 1, 8) == 'retry-ok'
  if not allowed or fingerprint ~= ARGV[2] then
    return {3, fingerprint, now - ended}
  end
  if ARGV[9] then
    return {5}
  end
  generation = generation + 1
  redis.call('HSET', KEYS[1], 'g', generation, 'o', ARGV[5])
end
if state then
  redis.call('HSET', KEYS[1], 't', ARGV[1], 'l', ends, 'k', ARGV[4])
end
redis.call('PEXPIREAT', KEYS[1], ends + ARGV[4])
if KEYS[2] then
  -- The index is only for listings: a user without rights on it gets the lease nevertheless.
  local number, longest = band(ARGV[4])
  redis.pcall('ZADD', KEYS[2], number * BAND + ends, ARGV[7])
  -- Removes members whose entries have expired: their leases expired longer ago than the longest retention of the band. Such
  -- members only cost space, so one ID in 16 does this.
  if longest and string.byte(ARGV[7], -1) % 16 == 0 then
    redis.pcall('ZREMRANGEBYSCORE', KEYS[2], number * BAND, number * BAND + now - longest)
  end
end
return {1, tonumber(generation)}
