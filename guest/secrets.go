package guest

import (
	"context"
	"fmt"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// SecretsDir is where programs in a guest find its secrets.
const SecretsDir = agentpb.SecretsDir

// olderAgent says what to do about an agent that does not know a call.
func olderAgent(err error) error {
	if !unknownCall(err) {
		return err
	}
	return fmt.Errorf("%w: the agent in this VM is older than that: stop the VM and boot it anew", err)
}

// ServeSecrets has the agent serve the VM's secrets as files in SecretsDir, if it does not
// yet, and has programs that wait for one look again. The values do not pass through this
// connection: the agent takes them from the VMM, when a program reads them. It fails with a
// *RemoteError if the guest's kernel has no FUSE, or its agent is older.
func (c *Client) ServeSecrets(ctx context.Context) error {
	_, err := call(ctx, c, "serve secrets", agentpb.AgentClient.Secrets, &agentpb.SecretsRequest{})
	return olderAgent(err)
}
