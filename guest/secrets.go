package guest

import (
	"context"
	"fmt"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// SecretsDir is the directory in a guest where programs find its secrets.
const SecretsDir = agentpb.SecretsDir

// olderAgent adds advice to the error of an agent that is too old to know the call.
func olderAgent(err error) error {
	if !unknownCall(err) {
		return err
	}
	return fmt.Errorf("%w: the agent in this VM is older than that: stop the VM and boot it anew", err)
}

// ServeSecrets makes the agent serve the VM's secrets as files in SecretsDir, unless it does so already, and makes
// programs that wait for one look again. The values do not pass through this connection: the agent gets them from
// the VMM when a program reads them. It fails with a *RemoteError if the guest's kernel has no FUSE, or its agent is
// too old.
func (c *Client) ServeSecrets(ctx context.Context) error {
	_, err := call(ctx, c, "serve secrets", agentpb.AgentClient.Secrets, &agentpb.SecretsRequest{})
	return olderAgent(err)
}
