//! Block keys that llm-d's own token processor printed, for every algorithm, seed, model and prompt of the test
//! vectors.

use kvatlas_core::hash::{Scheme, SchemeChains};
use serde_json::{Value, json};

use super::wides;

/// Prompts of the test vectors, by their tokens.
#[derive(Clone, Copy)]
enum Prompt {
    /// The tokens 1 to 53, in blocks of 16.
    Counted,
    /// The tokens 1 to 197, in blocks of 64.
    Counted64,
    /// Tokens whose values are at the limits of their encodings.
    Large,
    /// 48 tokens, numbered from 100, in three blocks. The first block has no image, the second has one, the third has
    /// two.
    Images,
}

/// The prompts, in the order of the keys.
const PROMPTS: [Prompt; 4] = [Prompt::Counted, Prompt::Counted64, Prompt::Large, Prompt::Images];

impl Prompt {
    fn tokens(self) -> Vec<u32> {
        match self {
            Self::Counted => (1..=53).collect(),
            Self::Counted64 => (1..=197).collect(),
            Self::Large => {
                let borders = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 1 << 31, u32::MAX];
                borders.into_iter().chain(7..=12).collect()
            }
            Self::Images => (100..148).collect(),
        }
    }

    fn block_size(self) -> usize {
        match self {
            Self::Counted64 => 64,
            _ => 16,
        }
    }

    fn extras(self, block: usize) -> &'static [&'static str] {
        match (self, block) {
            (Self::Images, 1) => &["image-a"],
            (Self::Images, 2) => &["image-a", "image-b"],
            _ => &[],
        }
    }
}

/// Block keys of each prompt, with the algorithm, the seed and the model.
struct Keys {
    algorithm: &'static str,
    seed: &'static str,
    model: &'static str,
    of_prompts: [&'static [u64]; 4],
}

const LLAMA: &str = "meta-llama/Llama-3.1-8B-Instruct";

const VECTORS: [Keys; 18] = [
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "",
        model: LLAMA,
        of_prompts: [
            &[4762004430771817687, 15345006280760138163, 11152609865747072141],
            &[15998386952029257237, 10513738357676136310, 6717572134603923654],
            &[13246181087207138038],
            &[10875869796742601563, 10569714926623175869, 8982326392129356962],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "",
        model: "m",
        of_prompts: [
            &[15354003621751916615, 17069895277783068821, 12567568463289313465],
            &[9103638133190354440, 1180985599454325073, 15404987550000730007],
            &[14294423998927306870],
            &[14178551597902109222, 8711730178583820288, 13222835813210799358],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "",
        model: "",
        of_prompts: [
            &[11745195676770573510, 17737378172567025242, 4034941851116240091],
            &[4224719647714815228, 13092430134214421727, 11565907960833422629],
            &[170653628061806240],
            &[797728073993885250, 5957163975328238097, 6567494147533123105],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "0",
        model: LLAMA,
        of_prompts: [
            &[297549293285847329, 14802850868966484399, 1115501755152029912],
            &[10701344619047308171, 15577764255626967990, 12147043735730036553],
            &[18063221034990133365],
            &[3886846419674380329, 1705975380095664491, 15715499074792283495],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "0",
        model: "m",
        of_prompts: [
            &[9328771515844929793, 16385681290855260888, 4062449995032121155],
            &[9058418486752362225, 3547370389567039065, 6816268861561038588],
            &[3215332984664435429],
            &[9160340351729593613, 3004329974902067702, 18142144248353882895],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "0",
        model: "",
        of_prompts: [
            &[1792218321210488863, 8308004539992355524, 11133944756307643280],
            &[7792141290221898084, 6345335070739481230, 13992767774985556949],
            &[14550424516690816113],
            &[8474988822421892330, 12684555834116265330, 15723514991819995669],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "42",
        model: LLAMA,
        of_prompts: [
            &[11711585542751291856, 7144963027108684272, 7497706848937681407],
            &[13428651864388875783, 17930577224105202886, 18372859479791664126],
            &[16863736310345173583],
            &[4246180910081709577, 4172061202385762753, 1932015129746084161],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "42",
        model: "m",
        of_prompts: [
            &[12438936772976642632, 7038913761082694750, 7073409138700743624],
            &[15666269219202335940, 7622725183763133469, 5016248529702416155],
            &[14778673712151199698],
            &[18227924057440671051, 3400907579712204000, 13358661203757143944],
        ],
    },
    Keys {
        algorithm: "llm-d-xxh64",
        seed: "42",
        model: "",
        of_prompts: [
            &[15134256191243637875, 17765999425124968054, 7613105380599362265],
            &[11389627097879505794, 12464297090529786828, 12904782475588191263],
            &[2163994812328488723],
            &[8648961862628959128, 16498986078399291675, 3316933599733601245],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "",
        model: LLAMA,
        of_prompts: [
            &[369436768847880749, 14719338691038004320, 7734130225493398187],
            &[10522609059103636781, 8441079271845698196, 2515334247697241206],
            &[8569880672484968405],
            &[840838903144113277, 7050024594969592681, 5261347487402463153],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "",
        model: "m",
        of_prompts: [
            &[18216873062712665045, 2244927951475950666, 1727636486708089175],
            &[5513053144817198165, 7641260691207872621, 9921375525576016984],
            &[4112134346508923037],
            &[16392499944081296325, 9892768828225581267, 7210877832293819849],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "",
        model: "",
        of_prompts: [
            &[3526539246283123114, 4332706628457518974, 7059507502454607651],
            &[5187832144764550474, 3639414332619943509, 18154310845177107658],
            &[11083008756415840946],
            &[16330208998785278074, 565686792748281218, 2383865484905026977],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "0",
        model: LLAMA,
        of_prompts: [
            &[14494296333015759360, 1196370228190290315, 5620865478525404416],
            &[16575609083496325720, 4431372225198839538, 16508391011136589047],
            &[201671599130075648],
            &[5533061805874031888, 6022532497325861332, 8928139862069156961],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "0",
        model: "m",
        of_prompts: [
            &[16080338327930183027, 8991273023640589035, 6642731354475045641],
            &[10682324797710459915, 17801650921814865652, 7412365956698208066],
            &[4430413064205329747],
            &[13525184220103729203, 17397889804636119085, 3752812005770917919],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "0",
        model: "",
        of_prompts: [
            &[2648230928994947484, 16700467405091992471, 8092754279503407684],
            &[653008989570234436, 17108066828777074354, 12039511815064112939],
            &[10111947695856733948],
            &[296018144539737484, 16604557403273011574, 10548617290999180134],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "42",
        model: LLAMA,
        of_prompts: [
            &[8775620590023426189, 12043309295452643676, 3148840392947272046],
            &[15133109944248569229, 680547670304209204, 8505703444147461868],
            &[10448257908037005685],
            &[5987726410484251613, 3255265144213791621, 17214450173318040550],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "42",
        model: "m",
        of_prompts: [
            &[10537172267815616279, 12405703473848005276, 1689542543402461112],
            &[11752599813133945327, 10909176858796045133, 16868418804418177423],
            &[1776363524701432855],
            &[826570854194730935, 5480249269921360149, 3746544921299912385],
        ],
    },
    Keys {
        algorithm: "llm-d-cbor-fnv",
        seed: "42",
        model: "",
        of_prompts: [
            &[17407038285339718207, 11886227601637063163, 11564181024938775161],
            &[11208370074226658039, 7868661298325661099, 214804537698243210],
            &[14126477693693840383],
            &[7469440865592995999, 12006437525484438847, 7129050020315312786],
        ],
    },
];

/// Returns the test vectors as they are in the file: a line for each algorithm and prompt, with the keys by seed and
/// model.
pub(crate) fn llmd_keys() -> Vec<Value> {
    let mut vectors = Vec::new();
    for algorithm in ["llm-d-xxh64", "llm-d-cbor-fnv"] {
        for (place, prompt) in PROMPTS.into_iter().enumerate() {
            let blocks = prompt.tokens().len() / prompt.block_size();
            let keys = VECTORS
                .iter()
                .filter(|keys| keys.algorithm == algorithm)
                .map(|keys| {
                    json!({
                        "seed": keys.seed,
                        "model": keys.model,
                        "sequence_hashes": wides(keys.of_prompts[place], |key| key),
                    })
                });
            vectors.push(json!({
                "scheme": algorithm,
                "block_size": prompt.block_size(),
                "tokens": prompt.tokens(),
                "extras": (0..blocks).map(|block| prompt.extras(block)).collect::<Vec<_>>(),
                "keys": keys.collect::<Vec<_>>(),
            }));
        }
    }
    vectors
}

#[test]
fn schemes_meet_the_vectors_of_llm_d() {
    for Keys {
        algorithm,
        seed,
        model,
        of_prompts,
    } in VECTORS
    {
        let scheme = match seed {
            "" => algorithm.to_owned(),
            seed => format!("{algorithm}:{seed}"),
        };
        let chains = SchemeChains::new(scheme.parse::<Scheme>().unwrap(), model);
        let steps = chains.steps().unwrap();
        for (prompt, keys) in PROMPTS.into_iter().zip(of_prompts) {
            let tokens = prompt.tokens();
            let mut last = steps.root(None);
            let blocks = tokens.chunks_exact(prompt.block_size()).enumerate();
            let computed: Vec<u64> = blocks
                .map(|(block, tokens)| {
                    last = steps.next(last, tokens, prompt.extras(block));
                    last.as_u64()
                })
                .collect();
            assert_eq!(computed, keys, "{scheme} of {model:?}");
        }
    }
}
