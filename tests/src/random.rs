//! Reproducible random numbers (SplitMix64).

use std::time::Duration;

/// The generator, which starts with a seed.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the only field is the seed")]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`.
    ///
    /// # Panics
    ///
    /// Panics if `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.draw() % limit as u64).expect("below a usize")
    }

    /// Returns a duration between 0.5 and 1.5 times `length`.
    pub fn around(&mut self, length: Duration) -> Duration {
        length / 2 + length.mul_f64((self.draw() % 1000) as f64 / 1000.0)
    }
}
