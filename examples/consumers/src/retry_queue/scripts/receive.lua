-- Returns the message that has been due for the longest time, or nil. KEYS: messages, queued ids. ARGV: visibility in ms.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id = redis.call('ZRANGE', KEYS[2], '-inf', now, 'BYSCORE', 'LIMIT', 0, 1)[1]
if not id then
  return nil
end
local message = cjson.decode(redis.call('HGET', KEYS[1], id))
message.delivery = message.delivery + 1
message.due = now + ARGV[1]
local text = cjson.encode(message)
redis.call('HSET', KEYS[1], id, text)
redis.call('ZADD', KEYS[2], message.due, id)
return text
