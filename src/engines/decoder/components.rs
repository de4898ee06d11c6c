//! SGLang's components: parts of its cache, one for full attention, one for windows and one for states. An event can
//! be about only some of them.
//!
//! With `--enable-kv-events-component-types`, a model with windows or states has events that name components. There
//! are two forms:
//!
//! | field | value | meaning |
//! |---|---|---|
//! | `component_type` | a text: `full`, `swa`, `mamba` | the event is only about this component |
//! | `component_types` | a list of such texts, or their bits: 1, 2, 4 | exactly these components now hold the blocks |

use kvatlas_core::wire::{DecodeError, Reader, Value};

use crate::batch::{Component, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored};
use crate::limits::DecodeLimits;

/// Maximum number of components in a list.
const COMPONENTS_MAX: usize = 16;
/// All components, in the order of their events in a batch. Main attention is first, because its blocks show at which
/// places the blocks of the other components stand.
const ALL: [Component; 4] = [
    Component::Full,
    Component::Window,
    Component::State,
    Component::Other,
];
/// Maximum number of events that one event makes: one for each component, and a removal of copies of main attention.
const MADE_MAX: usize = ALL.len() + 1;

/// The components that an event names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Components {
    /// The event is only about this component.
    One(Component),
    /// The event is about all components whose bit is set.
    All(u64),
}

impl Components {
    /// The component under which the event is decoded: the only one that it names, or full attention if it has a
    /// list. For a list, [`push`] then makes one event for each listed component.
    pub(super) fn first(self) -> Component {
        match self {
            Self::One(component) => component,
            Self::All(_) => Component::Full,
        }
    }
}

/// The component with this name; `None` if kvatlas does not know the name.
pub(super) fn named(name: &[u8]) -> Option<Component> {
    match name {
        b"full" => Some(Component::Full),
        b"swa" => Some(Component::Window),
        b"mamba" => Some(Component::State),
        b"c128" | b"auxiliary_swa" => Some(Component::Other),
        _ => None,
    }
}

fn bit(component: Component) -> u64 {
    match component {
        Component::Full => 1,
        Component::Window => 2,
        Component::State => 4,
        Component::Other => !7,
    }
}

fn read_name(reader: &mut Reader<'_>, limits: &DecodeLimits) -> Result<Component, DecodeError> {
    let name = reader.text("component_type", limits.text_bytes_max)?;
    Ok(named(name.as_bytes()).unwrap_or(Component::Other))
}

/// Reads one component; `None` for nil.
pub(super) fn read_one(
    reader: &mut Reader<'_>,
    limits: &DecodeLimits,
) -> Result<Option<Components>, DecodeError> {
    if matches!(reader.clone().value()?, Value::Nil) {
        reader.skip()?;
        return Ok(None);
    }
    read_name(reader, limits).map(|component| Some(Components::One(component)))
}

/// Reads all components that hold the blocks; `None` for nil, which tells nothing.
pub(super) fn read_all(
    reader: &mut Reader<'_>,
    limits: &DecodeLimits,
) -> Result<Option<Components>, DecodeError> {
    match reader.clone().value()? {
        Value::Nil => {
            reader.skip()?;
            Ok(None)
        }
        Value::Unsigned(bits) => {
            reader.skip()?;
            Ok(Some(Components::All(bits)))
        }
        _ => {
            let mut bits = 0;
            for _ in 0..reader.array("component_types", COMPONENTS_MAX)? {
                bits |= bit(read_name(reader, limits)?);
            }
            Ok(Some(Components::All(bits)))
        }
    }
}

/// Appends `event` to the batch, once for each component that it names. If a stored event lists components, the list
/// is complete. So removals are appended for the known components that the list leaves out.
///
/// # Errors
///
/// [`DecodeError::TooLong`] if the batch would have more than [`DecodeLimits::made_events_max`] events.
pub(super) fn push(
    components: Option<Components>,
    event: EngineEvent,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    let Some(Components::All(bits)) = components else {
        batch.push(event);
        return Ok(());
    };
    let (count, max) = (batch.events().len() + MADE_MAX, limits.made_events_max());
    if count > max {
        let field = "events";
        return Err(DecodeError::TooLong { field, count, max });
    }
    for component in ALL {
        let (group, is_named) = (component.group(), bits & bit(component) != 0);
        match event.change {
            EngineChange::Stored(stored) => {
                if is_named {
                    let change = EngineChange::Stored(EngineStored { group, ..stored });
                    batch.push(EngineEvent { change, ..event });
                }
                // SGLang keeps one copy of a block of main attention, even if events name the block again. The removal
                // takes all further copies away. For an unknown component there is no removal, because its blocks are
                // not kept here.
                if (!is_named && component != Component::Other) || component == Component::Full {
                    let left = is_named.then(|| batch.push_ones(stored.names.len()));
                    let removed = EngineRemoved {
                        names: stored.names,
                        tier: Some(stored.tier),
                        group,
                        left,
                    };
                    let change = EngineChange::Removed(removed);
                    batch.push(EngineEvent { change, ..event });
                }
            }
            EngineChange::Removed(removed) if is_named => {
                let change = EngineChange::Removed(EngineRemoved { group, ..removed });
                batch.push(EngineEvent { change, ..event });
            }
            _ => {}
        }
    }
    Ok(())
}
