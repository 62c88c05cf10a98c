-- Returns the messages in a state. KEYS: messages, ids in the state. ARGV: the largest number of messages.
local ids = redis.call('ZRANGE', KEYS[2], 0, ARGV[1] - 1)
return #ids > 0 and redis.call('HMGET', KEYS[1], unpack(ids)) or {}
