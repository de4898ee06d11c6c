//! Round trips: encoded values are decoded to the same values.

use proptest::prelude::*;

use super::super::{
    BatchReply, EventBatch, NamespaceName, QueryReply, QueryRequest, StatusReply, Subjects, WireLimits,
};
use super::generate;

proptest! {
    #[test]
    fn event_batches_round_trip(batch in generate::batch()) {
        prop_assert_eq!(EventBatch::decode(&batch.encode(), &WireLimits::default()), Ok(batch));
    }

    #[test]
    fn requests_round_trip(request in generate::request()) {
        prop_assert_eq!(QueryRequest::decode(&request.encode(), &WireLimits::default()), Ok(request));
    }

    #[test]
    fn query_replies_round_trip(reply in generate::query_reply()) {
        prop_assert_eq!(QueryReply::decode(&reply.encode()).unwrap(), reply);
    }

    #[test]
    fn batch_replies_round_trip(reply in generate::batch_reply()) {
        prop_assert_eq!(BatchReply::decode(&reply.encode()).unwrap(), reply);
    }

    #[test]
    fn status_replies_round_trip(reply in generate::status_reply()) {
        prop_assert_eq!(StatusReply::decode(&reply.encode()).unwrap(), reply);
    }

    /// Checks that an encoded request takes only a few bytes more than its lists.
    #[test]
    fn lists_travel_as_blobs(depth in 0_usize..2000) {
        let hashes = vec![crate::hash::SequenceHash(u64::MAX); depth];
        let request = QueryRequest::Single(super::super::SingleQuery::new(super::super::QueryKey::SequenceHashes(hashes)));
        prop_assert!(request.encode().len() <= 8 * depth + 32);
    }

    #[test]
    fn subjects_round_trip(worker in generate::worker(), namespace in "[A-Za-z0-9_-]{1,64}", prefix in "[a-z]{1,9}(\\.[a-z0-9]{1,9}){0,3}") {
        let subjects = Subjects::new(&prefix).unwrap();
        let namespace = NamespaceName::new(&namespace).unwrap();
        let events = subjects.events(&namespace, &worker);
        prop_assert_eq!(subjects.parse_events(&events, 64), Ok((namespace.clone(), worker)));
        prop_assert_eq!(subjects.parse_query(&subjects.query(&namespace), 64), Ok(namespace.clone()));
        prop_assert_eq!(subjects.parse_status(&subjects.status(&namespace), 64), Ok(namespace));
        prop_assert!(subjects.parse_query(&events, 64).is_err());
    }
}
