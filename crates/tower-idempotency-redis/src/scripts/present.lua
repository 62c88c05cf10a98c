-- Finds the indexes that exist, and writes nothing. KEYS: the first index, whose node runs the script. ARGV: indexes.
-- Returns a number for each: 1 if it exists, 0 if not, and 2 if it is on another node.
local found = {}
for number, index in ipairs(ARGV) do
  local reply = redis.pcall('EXISTS', index)
  found[number] = type(reply) == 'number' and reply or 2
end
return found
