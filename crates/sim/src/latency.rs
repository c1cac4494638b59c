//! How long a message travels from one host to another, one way.

use std::sync::Arc;
use std::time::Duration;

use crate::matrix::RttMatrix;
use crate::random::Random;

/// Pastis §5.2: "The maximal network latency, which corresponds to two diametrically
/// opposed points, was set to 300 ms."
pub const PASTIS_SPHERE_MAX: Duration = Duration::from_millis(300);

/// A model of one-way latency. A host reaches itself at once in every model.
#[derive(Clone, Debug)]
pub enum Latency {
    /// Pastis §4: "all nodes are equally distant from one another".
    Flat(Duration),
    /// Pastis §4: "nodes are randomly located on a sphere", latency "proportional to
    /// the distance ... in physical space", which we take along the surface, so that
    /// the mean is half the maximum.
    Sphere {
        /// Between two diametrically opposed points; [`PASTIS_SPHERE_MAX`] in the paper.
        max: Duration,
    },
    /// Half of a measured round trip each way. Host i stands at row i modulo the
    /// number of rows; hosts of one row are as far apart as its diagonal says, which is
    /// often zero, so give them an access delay ([`crate::HostConfig`]).
    Matrix(Arc<RttMatrix>),
}

/// A point of the unit sphere, uniform over its surface.
pub(crate) fn random_point(random: &mut Random) -> [f32; 3] {
    let z = 2.0 * random.unit() - 1.0;
    let angle = std::f64::consts::TAU * random.unit();
    let r = (1.0 - z * z).sqrt();
    [(r * angle.cos()) as f32, (r * angle.sin()) as f32, z as f32]
}

impl Latency {
    /// Nanoseconds from host `a` at one point to host `b` at another.
    pub(crate) fn between(&self, a: (u32, [f32; 3]), b: (u32, [f32; 3])) -> u64 {
        if a.0 == b.0 {
            return 0;
        }
        match self {
            Latency::Flat(delay) => delay.as_nanos() as u64,
            Latency::Sphere { max } => {
                let dot: f64 = (0..3).map(|i| f64::from(a.1[i]) * f64::from(b.1[i])).sum();
                let angle = dot.clamp(-1.0, 1.0).acos();
                (max.as_nanos() as f64 * angle / std::f64::consts::PI) as u64
            }
            Latency::Matrix(matrix) => {
                let rows = matrix.host_count() as u32;
                u64::from(matrix.rtt_us(a.0 % rows, b.0 % rows)) * 500
            }
        }
    }
}
