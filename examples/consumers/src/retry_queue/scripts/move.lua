-- Moves a message if it is still in the old state and at the delivery. Returns 1, or 0.
-- KEYS: messages, ids in the old state, ids in the new state.
-- ARGV: id, delivery, old state, new state, failures, delay in ms, round or '', reason or ''.
local stored = redis.call('HGET', KEYS[1], ARGV[1])
local message = stored and cjson.decode(stored)
if not message or message.delivery ~= tonumber(ARGV[2]) or message.state ~= ARGV[3] then
  return 0
end
local time = redis.call('TIME')
message.since = time[1] * 1000 + math.floor(time[2] / 1000)
message.due = message.since + ARGV[6]
message.state = ARGV[4]
message.failures = tonumber(ARGV[5])
message.round = tonumber(ARGV[7]) or message.round
message.reason = ARGV[8] ~= '' and ARGV[8] or message.reason
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(message))
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[3], message.due, ARGV[1])
return 1
