-- Compare and set: replaces a value only while it is what the writer last saw.
-- KEYS[1] key; ARGV[1] expected value, empty for absent; ARGV[2] new value; ARGV[3] time to live, milliseconds.
-- Returns {1} when replaced, {0, value} or {0} (absent) when it was something else.
local current = redis.call('GET', KEYS[1])
if (current or '') == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return {1}
end
if current then
  return {0, current}
end
return {0}
