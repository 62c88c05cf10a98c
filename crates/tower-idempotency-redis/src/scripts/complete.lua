-- Stores the record and ends the lease. ARGV: token, fingerprint, generation, record, retention in ms, 1 to publish.
-- Answers 1, 0 when another token holds or completed the entry, or -1 for an entry that a newer version wrote.
local entry = redis.call('HMGET', KEYS[1], 's', 't', 'g')
local state, token = entry[1], entry[2]
if state and state ~= 'L' and state ~= 'D' then
  return -1
end
if state and token and token ~= ARGV[1] then
  return 0
end
if state == 'D' then
  -- Ours. Its end is set again as it is, so that whoever waits for replicas after this call waits for something: by a write
  -- that needs no memory, for there may be none.
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then
    redis.call('PEXPIRE', KEYS[1], left)
  else
    -- Somebody has taken its end away.
    redis.call('HSET', KEYS[1], 't', token)
  end
  return 1
end
local generation = ARGV[3]
if state and token then
  generation = entry[3]
end
-- The lease goes first: HDEL needs no memory, and a script that has written goes on when memory is full, so whoever was granted
-- a lease finds room for its record. Not by DEL: of a slot that moves, a key that is gone is the other node's, and the rest of
-- the script would be refused.
redis.call('HDEL', KEYS[1], 'l', 'k', 'o', 'p', 'c')
redis.call('HSET', KEYS[1], 's', 'D', 't', ARGV[1], 'f', ARGV[2], 'g', generation, 'b', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
if ARGV[6] == '1' then
  -- A hint: who may not give it has done the rest all the same.
  redis.pcall('PUBLISH', KEYS[1], '')
end
return 1
