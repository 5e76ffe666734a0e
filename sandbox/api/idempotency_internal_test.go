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
