-- Scores of leases in their index. A band of scores is for orphan retentions up to a number of milliseconds, so that one command
-- removes the members whose entries have expired. Within a band the order is that of the expiry of the lease. Members of a
-- former version have no band: their scores are below the first one.
local BAND = 17592186044416
-- Longest retentions of the bands. The band after them has none.
local LONGEST = {3600000, 172800000, 5529600000}
local function band(keep)
  keep = tonumber(keep) or 0
  for number, longest in ipairs(LONGEST) do
    if keep <= longest then
      return number
    end
  end
  return #LONGEST + 1
end
local function score(ends, keep)
  return string.format('%.0f', band(keep) * BAND + ends)
end
