//! Labels of pods that become labels of their engines.

use std::collections::BTreeMap;
use std::str::FromStr;

use kvatlas_core::wire::{Labels, ProfileError};

/// Maximum length of a pod label's value, in bytes, as the Kubernetes API allows it.
const VALUE_BYTES_MAX: usize = 63;

/// Keys of the pods' labels that become labels of their engines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodLabels(Vec<String>);

/// Error for a text that is no list of label keys, or names too many.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; write KEY,KEY…, whose values may have {VALUE_BYTES_MAX} bytes each")]
pub struct PodLabelsError {
    reason: ProfileError,
}

impl FromStr for PodLabels {
    type Err = PodLabelsError;

    /// Reads keys that are joined by commas. The keys, each with a value of maximum length, have to fit into an
    /// engine's labels.
    fn from_str(text: &str) -> Result<Self, PodLabelsError> {
        let keys: Vec<String> = text.split(',').map(|key| key.trim().to_owned()).collect();
        let longest = "v".repeat(VALUE_BYTES_MAX);
        let labels = keys.iter().map(|key| (key.clone(), longest.clone()));
        match Labels::new(labels.collect()) {
            Ok(_) => Ok(Self(keys)),
            Err(reason) => Err(PodLabelsError { reason }),
        }
    }
}

impl PodLabels {
    /// Returns the chosen labels of a pod, that is, the labels with these keys.
    pub fn of(&self, pod: &BTreeMap<String, String>) -> Labels {
        let chosen = self.0.iter().filter_map(|key| pod.get_key_value(key));
        let chosen = chosen.map(|(key, value)| (key.clone(), value.clone()));
        // The keys fit with values of maximum length. If an API allows longer values, the engine gets no labels.
        Labels::new(chosen.collect()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_labels_are_those_that_a_pod_has() {
        let chosen: PodLabels = "role, topology.kubernetes.io/zone,tier".parse().unwrap();
        let pod = ["role=decode", "topology.kubernetes.io/zone=a", "app=vllm"];
        let pod = pod.iter().filter_map(|label| label.split_once('='));
        let pod = pod.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let labels = chosen.of(&pod.collect());
        assert_eq!(labels.to_string(), "role=decode,topology.kubernetes.io/zone=a");
        assert!(PodLabels::default().of(&BTreeMap::new()).is_empty());
        let long = BTreeMap::from([("role".to_owned(), "v".repeat(600))]);
        assert!(chosen.of(&long).is_empty());
    }

    #[test]
    fn keys_fit_into_an_engines_labels() {
        for wrong in ["", "a,", "a=b", "a b", &"k".repeat(65)] {
            let error = wrong.parse::<PodLabels>().unwrap_err();
            assert_eq!(error.reason, ProfileError::LabelKey, "{wrong}");
        }
        let keys = |count: usize| {
            (0..count)
                .map(|key| key.to_string())
                .collect::<Vec<_>>()
                .join(",")
        };
        assert!(keys(8).parse::<PodLabels>().is_ok());
        let error = keys(9).parse::<PodLabels>().unwrap_err();
        let bytes = 9 * (1 + VALUE_BYTES_MAX);
        assert_eq!(error.reason, ProfileError::LabelsTooLong { bytes });
    }
}
