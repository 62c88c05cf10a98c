//! Random number generator of the tests, with the same numbers on every run and every machine.

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number: a hashed counter (SplitMix64).
    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut hash = self.0;
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    }

    /// Returns a number below `end`, or 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end.max(1)).unwrap_or(u64::MAX);
        usize::try_from(self.number() % end).unwrap_or(0)
    }

    /// Returns `true` with a probability of 1 in `times`.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.number().to_be_bytes()[0]
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    // Only tests that shuttle leaves out use it.
    #[cfg(not(shuttle))]
    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.byte()).collect()
    }

    /// Changes `bytes` at random, as damage or an attacker would: flips, inserts, deletes, repeats or appends bytes.
    pub(crate) fn mutate(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len());
        let length = (1 + self.below(8)).min(bytes.len() - at);
        match self.below(8) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = *self.pick(&SPECIAL_BYTES),
            2 => bytes.insert(at, self.byte()),
            3 => drop(bytes.drain(at..at + length)),
            4 => bytes.truncate(at),
            5 => {
                let more = bytes[at..at + length].to_vec();
                let to = self.below(bytes.len());
                bytes.splice(to..to, more);
            }
            6 => {
                let number = self.number().to_be_bytes();
                bytes[at..at + length].copy_from_slice(&number[..length]);
            }
            _ => bytes.push(self.byte()),
        }
    }
}

/// Bytes with a meaning for one of the parsers: MessagePack markers, structured fields and JSON.
const SPECIAL_BYTES: [u8; 40] = [
    0x00, 0x01, 0x7f, 0x80, 0x81, 0x85, 0x8f, 0x90, 0x92, 0x9f, 0xa0, 0xa4, 0xbf, 0xc0, 0xc1, 0xc4,
    0xc5, 0xc6, 0xc7, 0xca, 0xcc, 0xcf, 0xd4, 0xd9, 0xda, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff,
    b'"', b'\\', b';', b',', b' ', b'{', b'[', b':',
];
