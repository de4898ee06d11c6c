use super::*;

fn reader(bytes: &[u8]) -> Reader<'_> {
    Reader::new(bytes, 1 << 20).unwrap()
}

#[test]
fn an_announced_length_that_lies_takes_no_memory() {
    // The head of an array of 4 billion elements. The payload has five bytes, and the limit allows any number.
    let lie = [0xdd, 0xff, 0xff, 0xff, 0xff];
    assert!(matches!(
        reader(&lie).list::<u64>("x", usize::MAX),
        Err(DecodeError::Truncated { .. })
    ));
    let lie = [0xc6, 0xff, 0xff, 0xff, 0xff, 1];
    assert!(matches!(
        reader(&lie).list::<u64>("x", usize::MAX),
        Err(DecodeError::Truncated { .. })
    ));
}

#[test]
fn deep_nesting_is_passed_over_without_recursion() {
    let mut nested = vec![0x91; 1 << 20];
    nested[(1 << 20) - 1] = 0xc0;
    let mut reader = reader(&nested);
    assert_eq!(reader.skip(), Ok(()));
    assert_eq!(reader.finish(), Ok(()));
}

#[test]
fn signed_encodings_of_positive_numbers_are_taken() {
    assert_eq!(reader(&[0xd0, 5]).unsigned("x"), Ok(5));
    assert_eq!(reader(&[0xd3, 0, 0, 0, 0, 0, 0, 1, 0]).unsigned("x"), Ok(256));
    assert!(matches!(
        reader(&[0xd0, 0xff]).unsigned("x"),
        Err(DecodeError::WrongType { .. })
    ));
    assert!(matches!(
        reader(&[0xff]).unsigned("x"),
        Err(DecodeError::WrongType { .. })
    ));
    assert_eq!(
        reader(&[0xc1]).unsigned("x"),
        Err(DecodeError::Reserved { offset: 0 })
    );
}

#[test]
fn negative_numbers_and_floats_keep_their_value() {
    let value = |bytes: &'static [u8]| reader(bytes).value();
    assert_eq!(value(&[0xff]), Ok(Value::Negative(-1)));
    assert_eq!(value(&[0xd0, 0x80]), Ok(Value::Negative(-128)));
    assert_eq!(value(&[0xd2, 0xff, 0xff, 0xff, 0xfe]), Ok(Value::Negative(-2)));
    assert_eq!(
        value(&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 1]),
        Ok(Value::Negative(i64::MIN + 1))
    );
    assert_eq!(value(&[0xca, 0x3f, 0x80, 0, 0]), Ok(Value::Float(1.0)));
    assert_eq!(value(&[0xcb, 0xc0, 0, 0, 0, 0, 0, 0, 0]), Ok(Value::Float(-2.0)));
}

#[test]
fn a_list_of_numbers_takes_every_encoding() {
    let bytes = [
        0x05, 0xcc, 200, 0xcd, 1, 0, 0xce, 0, 1, 0, 0, 0xd2, 0, 0, 0, 9, 0xcf, 0, 0, 0, 0, 0, 0, 0, 7,
    ];
    let mut list = Vec::new();
    assert_eq!(reader(&bytes).unsigned_32_list("x", 6, &mut list), Ok(()));
    assert_eq!(list, [5, 200, 256, 65_536, 9, 7]);
    for damaged in [
        &[0xff_u8][..],
        &[0xcd, 1],
        &[0xce, 1, 2, 3],
        &[0xcf, 1, 0, 0, 0, 0, 0, 0, 0],
        &[],
    ] {
        assert!(reader(damaged).unsigned_32_list("x", 1, &mut list).is_err());
    }
    assert!(list.capacity() < 100);
    assert!(
        reader(&[1, 2])
            .unsigned_32_list("x", usize::MAX, &mut list)
            .is_err()
    );
    assert!(list.capacity() < 100);
}

#[test]
fn an_oversized_payload_is_not_read() {
    assert_eq!(
        Reader::new(&[0; 11], 10).unwrap_err(),
        DecodeError::Oversized { bytes: 11, max: 10 }
    );
}

#[test]
fn a_list_is_a_blob_or_an_array() {
    let blob = [0xc4, 16, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0x80];
    assert_eq!(
        reader(&blob).list::<u64>("x", 2),
        Ok(vec![1, 0x8000_0000_0000_0002])
    );
    let array = [0x92, 1, 0xcd, 1, 0];
    assert_eq!(reader(&array).list::<u64>("x", 2), Ok(vec![1, 256]));
    assert_eq!(
        reader(&array).list::<u64>("x", 1),
        Err(DecodeError::TooLong {
            field: "x",
            count: 2,
            max: 1
        })
    );
    let ragged = [0xc4, 3, 1, 2, 3];
    assert_eq!(
        reader(&ragged).list::<u64>("x", 9),
        Err(DecodeError::RaggedBlob {
            field: "x",
            bytes: 3,
            element: 8
        })
    );
}
