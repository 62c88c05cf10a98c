//! Numbers that are random and the same each time (SplitMix64).

use std::time::Duration;

/// The generator, which starts with a seed.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a seed and nothing else")]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `limit`.
    ///
    /// # Panics
    ///
    /// If `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.draw() % limit as u64).expect("below a usize")
    }

    /// Between half of `length` and one and a half.
    pub fn around(&mut self, length: Duration) -> Duration {
        length / 2 + length.mul_f64((self.draw() % 1000) as f64 / 1000.0)
    }
}
