-- Adds a message. Returns 1, or 0 if the id is known. KEYS: messages, queued ids. ARGV: id, body.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local message = {
  id = ARGV[1], body = ARGV[2], state = 'queued', delivery = 0, failures = 0, round = 0, since = now, due = now, reason = ''
}
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(message))
redis.call('ZADD', KEYS[2], now, ARGV[1])
return 1
