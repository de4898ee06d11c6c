//! Histograms over fixed buckets. A sample is counted in its bucket as soon as it is recorded.
//!
//! The library for Prometheus would instead keep each sample (16 bytes) until somebody collects the metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Histogram, HistogramFn};
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::write_metric_line;

/// One series: the counts of a histogram for one set of labels.
#[derive(Debug)]
pub(super) struct Buckets {
    bounds: &'static [f64],
    /// Number of samples in each bucket, without those in lower buckets. The last bucket has the samples above all bounds.
    counts: Box<[AtomicU64]>,
    /// Sum of all samples, as the bits of an `f64`.
    sum: AtomicU64,
}

/// Returns the index of a sample's bucket, which is the first bucket whose upper bound is at least the sample.
fn bucket_of(bounds: &[f64], sample: f64) -> usize {
    bounds.iter().take_while(|bound| sample > **bound).count()
}

impl Buckets {
    /// Makes buckets with these upper bounds, without a sample.
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    fn add(&self, bucket: usize, count: u64, sum: f64) {
        if let Some(counted) = self.counts.get(bucket) {
            counted.fetch_add(count, Ordering::Relaxed);
        }
        let add = |bits| Some((f64::from_bits(bits) + sum).to_bits());
        // `add` always returns a value, so the update never fails.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

impl HistogramFn for Buckets {
    fn record(&self, value: f64) {
        self.record_many(value, 1);
    }

    fn record_many(&self, value: f64, count: usize) {
        self.add(bucket_of(self.bounds, value), count as u64, value * count as f64);
    }
}

impl Buckets {
    /// Appends the lines of the series in Prometheus' text format.
    pub(super) fn render(&self, name: &str, labels: &LabelSet, text: &mut String) {
        let mut bucket = |bound: &dyn std::fmt::Display, count: u64| {
            write_metric_line(
                text,
                name,
                Some("bucket"),
                labels,
                Some(("le", bound)),
                count,
                None,
            );
        };
        let (mut count, mut counts) = (0, self.counts.iter());
        for (bound, counted) in self.bounds.iter().zip(&mut counts) {
            count += counted.load(Ordering::Relaxed);
            bucket(bound, count);
        }
        count += counts.map(|above| above.load(Ordering::Relaxed)).sum::<u64>();
        bucket(&"+Inf", count);
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed));
        write_metric_line::<&str, f64>(text, name, Some("sum"), labels, None, sum, None);
        write_metric_line::<&str, u64>(text, name, Some("count"), labels, None, count, None);
    }
}

/// Samples that are gathered first, and recorded together in one histogram later. Recording many samples in this way takes fewer
/// atomic additions.
#[derive(Debug)]
pub(super) struct Samples<const COUNT: usize> {
    bounds: &'static [f64; COUNT],
    counts: [u32; COUNT],
    sums: [f64; COUNT],
    above: Vec<f64>,
}

impl<const COUNT: usize> Samples<COUNT> {
    pub(super) fn new(bounds: &'static [f64; COUNT]) -> Self {
        Self {
            bounds,
            counts: [0; COUNT],
            sums: [0.0; COUNT],
            above: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, sample: f64) {
        let bucket = bucket_of(self.bounds, sample);
        match (self.counts.get_mut(bucket), self.sums.get_mut(bucket)) {
            (Some(count), Some(sum)) => (*count, *sum) = (*count + 1, *sum + sample),
            _ => self.above.push(sample),
        }
    }

    /// Records all gathered samples in the histogram, and forgets them. Every sample of a bucket is recorded with the mean of the
    /// bucket's samples.
    pub(super) fn record(&mut self, histogram: &Histogram) {
        for (bucket, count) in self
            .counts
            .iter_mut()
            .enumerate()
            .filter(|(_, count)| **count > 0)
        {
            let mean = self.sums[bucket] / f64::from(*count);
            // Rounding must not move the mean into a neighbouring bucket.
            let below = bucket.checked_sub(1).map(|below| self.bounds[below].next_up());
            let mean = mean.max(below.unwrap_or(f64::MIN)).min(self.bounds[bucket]);
            histogram.record_many(mean, *count as usize);
            (*count, self.sums[bucket]) = (0, 0.0);
        }
        for sample in self.above.drain(..) {
            histogram.record(sample);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const BOUNDS: &[f64; 3] = &[0.1, 1.0, 2.0];

    fn counts(buckets: &Buckets) -> Vec<u64> {
        let counts = buckets.counts.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn samples_that_are_recorded_together_are_in_the_buckets_of_each() {
        let (one_by_one, together) = (Arc::new(Buckets::new(BOUNDS)), Arc::new(Buckets::new(BOUNDS)));
        let mut samples = Samples::new(BOUNDS);
        for number in 0..1000_u32 {
            let sample = f64::from(number % 27) / 10.0;
            one_by_one.record(sample);
            samples.add(sample);
        }
        let handle = Histogram::from_arc(Arc::clone(&together));
        samples.record(&handle);
        // `record` has forgotten the samples, so a second call records nothing.
        samples.record(&handle);
        assert_eq!(counts(&one_by_one), counts(&together));
        assert_eq!(counts(&together).iter().sum::<u64>(), 1000);
        let sum = |buckets: &Buckets| f64::from_bits(buckets.sum.load(Ordering::Relaxed));
        assert!((sum(&one_by_one) - sum(&together)).abs() < 1e-6);
    }

    #[test]
    fn a_sample_at_a_bound_is_below_it_however_often_it_comes() {
        let buckets = Arc::new(Buckets::new(BOUNDS));
        let mut samples = Samples::new(BOUNDS);
        for _ in 0..77 {
            samples.add(0.1);
        }
        samples.record(&Histogram::from_arc(Arc::clone(&buckets)));
        assert_eq!(counts(&buckets), [77, 0, 0, 0]);
    }
}
