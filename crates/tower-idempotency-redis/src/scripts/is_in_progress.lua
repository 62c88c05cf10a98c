-- Returns 1 if the entry is in progress, else 0. Writes nothing.
local entry = redis.call('HMGET', KEYS[1], 's', 'l')
if entry[1] ~= 'L' then
  return 0
end
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) < tonumber(entry[2]) then
  return 1
end
return 0
