package kvatlas

import "fmt"

// A Query asks which holders hold how long a prefix of a prompt. The prompt stands in exactly one of Tokens, BlockHashes, SequenceHashes and
// LineageHashes; all else may be left out.
type Query struct {
	// Tokens are the prompt's; the daemon cuts and hashes them. LoraName and CacheSalt may stand beside them.
	Tokens    []uint32
	LoraName  string
	CacheSalt string

	// BlockHashes are the hashes of each block: see BlockHashes.
	BlockHashes []uint64
	// SequenceHashes are the rolling hashes of each block: the cheapest form.
	SequenceHashes []uint64
	// LineageHashes are one chain from position 0.
	LineageHashes []LineageHash
	// Positions, beside sequence or lineage hashes, say where each stands: the hashes are chosen from one chain, and the answer has bounds.
	Positions []uint32
	// TokenCount is the number of tokens of the prompt, beside hashes, or beside Tokens that the prompt goes on behind. An engine always
	// computes the last token. With 0, every block of hashes counts, and the last of Tokens is the prompt's last.
	TokenCount uint64

	// Workers are the only ones to answer for; all where it is nil.
	Workers []string
	// Limit is the most holders in the answer, the best first; all where it is 0.
	Limit uint64
	// MinBlocks leaves out holders with fewer matched blocks.
	MinBlocks uint32
	// Explain asks where each holder dropped out.
	Explain bool
	// Tiers asks how many of its blocks each holder has on the device, and on device and host.
	Tiers bool
	// Predicted asks, apart, who will have more of the prompt soon, by what routers have hinted.
	Predicted bool
}

// entries are the query as a map. The contract's limits on sizes are the daemon's to check.
func (q Query) entries() (fields, error) {
	found, err := q.prompt()
	if err != nil {
		return nil, err
	}
	if q.Workers != nil {
		for _, worker := range q.Workers {
			if err := checkName("worker", worker); err != nil {
				return nil, err
			}
		}
		found["workers"] = q.Workers
	}
	if q.Limit > 0 {
		found["limit"] = q.Limit
	}
	if q.MinBlocks > 0 {
		found["min_blocks"] = q.MinBlocks
	}
	if q.Explain {
		found["explain"] = true
	}
	if q.Tiers {
		found["tiers"] = true
	}
	if q.Predicted {
		found["predicted"] = true
	}
	return found, nil
}

// prompt is the form of the prompt, and what stands beside it.
func (q Query) prompt() (fields, error) {
	found := fields{}
	if q.Tokens != nil {
		found["tokens"] = appendTokens(nil, q.Tokens)
	}
	if q.BlockHashes != nil {
		found["block_hashes"] = hashBlob(q.BlockHashes)
	}
	if q.SequenceHashes != nil {
		found["sequence_hashes"] = hashBlob(q.SequenceHashes)
	}
	if q.LineageHashes != nil {
		lineage := make([]byte, 0, 16*len(q.LineageHashes))
		for _, hash := range q.LineageHashes {
			lineage = append(lineage, hash[:]...)
		}
		found["lineage_hashes"] = lineage
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%w: a query gives the prompt in %d forms; give exactly one", ErrInvalid, len(found))
	}
	if q.Tokens == nil && (q.LoraName != "" || q.CacheSalt != "") {
		return nil, fmt.Errorf("%w: LoraName and CacheSalt stand beside Tokens only", ErrInvalid)
	}
	if q.Tokens != nil && q.TokenCount != 0 && q.TokenCount < uint64(len(q.Tokens)) {
		return nil, fmt.Errorf("%w: TokenCount is less than the number of Tokens", ErrInvalid)
	}
	if q.LoraName != "" {
		found["lora_name"] = q.LoraName
	}
	if q.CacheSalt != "" {
		found["cache_salt"] = q.CacheSalt
	}
	if q.Positions != nil {
		found["positions"] = appendTokens(nil, q.Positions)
	}
	if q.TokenCount > 0 {
		found["token_count"] = q.TokenCount
	}
	return found, nil
}

func encodeQuery(query Query) ([]byte, error) {
	entries, err := query.entries()
	if err != nil {
		return nil, err
	}
	entries["v"] = protocolVersion
	return encode(entries)
}

func encodeQueries(queries []Query) ([]byte, error) {
	listed := make([]fields, 0, len(queries))
	for number, query := range queries {
		entries, err := query.entries()
		if err != nil {
			return nil, fmt.Errorf("query %d: %w", number, err)
		}
		listed = append(listed, entries)
	}
	return encode(fields{"v": protocolVersion, "queries": listed})
}
