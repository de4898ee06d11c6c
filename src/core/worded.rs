//! Enums whose values have words: texts for the wire, files and metrics.

/// Declares an enum in which each value has a word, a text that must not change. Each variant is given with its word:
/// `Variant => "word"`, or `Variant = NUMBER => "word"`.
///
/// `ALL` has all values in the order of declaration, and `WORDS` has their words in the same order. `as_str` returns
/// the word of a value, and `of_word` returns the value of a word. If the variants have no attributes other than
/// documentation, `MEANINGS` has the documentation of each value.
#[macro_export]
macro_rules! worded {
    ($(#[$enum_attribute:meta])* $visibility:vis enum $name:ident {
        $($(#[doc = $doc:literal])* $variant:ident $(= $number:expr)? => $word:literal,)+
    }) => {
        $crate::worded! {
            @enum $(#[$enum_attribute])* $visibility enum $name {
                $($(#[doc = $doc])* $variant $(= $number)? => $word,)+
            }
        }

        impl $name {
            /// Documentation of all values of the enum, in the order of the values' declaration.
            #[allow(dead_code, reason = "few enums are explained to users")]
            pub const MEANINGS: [&'static str; Self::WORDS.len()] = [$(concat!($($doc),*)),+];
        }
    };
    ($(#[$enum_attribute:meta])* $visibility:vis enum $name:ident { $($variants:tt)+ }) => {
        $crate::worded! { @enum $(#[$enum_attribute])* $visibility enum $name { $($variants)+ } }
    };
    (@enum $(#[$enum_attribute:meta])* $visibility:vis enum $name:ident {
        $($(#[$attribute:meta])* $variant:ident $(= $number:expr)? => $word:literal,)+
    }) => {
        $(#[$enum_attribute])*
        $visibility enum $name {
            $($(#[$attribute])* $variant $(= $number)?,)+
        }

        impl $name {
            /// All values of the enum, in the order of their declaration.
            pub const ALL: [Self; Self::WORDS.len()] = [$(Self::$variant),+];

            /// Words of all values of the enum, in the order of the values' declaration.
            pub const WORDS: [&'static str; [$($word),+].len()] = [$($word),+];

            /// Returns the word of the value, as given in the enum's declaration.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }

            /// Returns the value of which `word` is the word. `None` if there is no such value.
            pub fn of_word(word: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.as_str() == word)
            }
        }
    };
}
