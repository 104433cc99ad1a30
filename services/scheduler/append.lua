-- Prepend a line to a bounded list.
-- KEYS[1] list; ARGV[1] time to live, milliseconds; ARGV[2] the line; ARGV[3] most lines to keep.
redis.call('LPUSH', KEYS[1], ARGV[2])
redis.call('LTRIM', KEYS[1], 0, tonumber(ARGV[3]) - 1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
