package api

import (
	"crypto/sha256"
	"fmt"
	"testing"
)

func TestAttack_tokens_of_one_owner_push_the_answers_to_others_out(t *testing.T) {
	var k keys
	ask := func(owner, name, key string) bool {
		t.Helper()
		of := keyOf{caller{name: name, owner: owner}, key}
		a, fresh, err := k.take(of, [sha256.Size]byte{})
		if err != nil {
			t.Fatal(err)
		}
		if fresh {
			k.end(of, a, true, 200, nil)
		}
		return fresh
	}
	ask("them", "theirs", "order")
	for n := range 2 * maxKeys {
		ask("us", fmt.Sprint("ours-", n%8), fmt.Sprint(n))
	}
	if ask("them", "theirs", "order") {
		t.Error("another owner's request is done a second time")
	}
	if len(k.all) != maxKeysOfOne+1 || len(k.of) != 2 {
		t.Errorf("%d keys of %d callers", len(k.all), len(k.of))
	}
}

func TestAttack_owners_push_the_answers_to_others_out(t *testing.T) {
	const big = 64 << 10
	for name, c := range map[string]struct{ owners, keys, bytes int }{
		"one owner by large answers":   {1, 2 * maxKeysHeld / big, big},
		"many owners by many answers":  {16, maxKeysOfOne, 0},
		"many owners by large answers": {8, 2 * maxKeysHeld / big / 8, big},
	} {
		var k keys
		ask := func(owner, key string, bytes int) bool {
			t.Helper()
			of := keyOf{caller{owner: owner}, key}
			a, fresh, err := k.take(of, [sha256.Size]byte{})
			if err != nil {
				t.Fatal(err)
			}
			if fresh {
				k.end(of, a, true, 200, make([]byte, bytes))
			}
			return fresh
		}
		ask("them", "order", 1000)
		for n := range c.keys {
			for o := range c.owners {
				ask(fmt.Sprint("us-", o), fmt.Sprint(n), c.bytes)
			}
		}
		if ask("them", "order", 1000) {
			t.Errorf("%s: another owner's request is done a second time", name)
		}
		if len(k.all) > maxKeys || k.held > maxKeysHeld {
			t.Errorf("%s: %d keys, %d bytes", name, len(k.all), k.held)
		}
	}
}
